"""Sessions that grow, pause and come back: found, and ranked by when they return."""

from kedge.policies.sessions.ledger import NO_SESSIONS as NO_SESSIONS
from kedge.policies.sessions.ledger import SessionLedger as SessionLedger
from kedge.policies.sessions.ledger import Turn as Turn
from kedge.policies.sessions.ledger import refused as refused
from kedge.policies.sessions.turns import SessionHints as SessionHints
from kedge.policies.sessions.turns import SessionKey as SessionKey
from kedge.policies.sessions.turns import TurnEnd as TurnEnd

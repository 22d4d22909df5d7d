"""Bounds of what is remembered of a namespace, so that nobody fills the memory: what is oldest is forgotten first."""

from kedge.policies.fixed_prompts import WAYS
from kedge.structures.bounded import ENTRIES

MAX_AGENTS = ENTRIES
"""Agents, runs, examples of prompts, and attempts to learn a template"""
MAX_VALUES = 8192
"""Values and their kinds, texts of runs, ends of prompts, and requests without an answer yet"""
MAX_OF_ONE = 16
"""Names, templates and successors of an agent, prompts in a row after which it was none, readers of a text in a run,
and reasons that are counted alone"""
MAX_LOOKED_AT = 64
"""Agents and runs that one look compares, tokens of a text that it samples, agents whose templates are reviewed, and
rows of a report's tables"""
MAX_BYTES = 1 << 23
"""Bytes of known texts, of prompts that are examples, and of one prompt of every agent that is reviewed. Agents that
take turns are learned only while `EXAMPLES` prompts of each are among the examples."""
LEAST_TOKENS = 8
"""Fewest tokens that identify a text; as many that all prompts have in common are fixed text of the template"""
SHORT = 32
"""Most tokens of a short value, such as a time or a name; fewest of a difference, or of a saving, that is
reported"""
EXAMPLES = WAYS
"""Prompts that differ from which a template is learned, as many as make the end of a fixed prompt, as many as a review
looks at, and values of a kind from which on it is known whether they tell runs apart"""

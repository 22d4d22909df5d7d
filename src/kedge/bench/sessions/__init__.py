"""Caching of growing sessions: traces of real agents replayed in virtual time through Kedge's own cache."""

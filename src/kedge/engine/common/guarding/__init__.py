"""The quality guard at work beside an engine. Its checks are requests, so that any engine can carry them out."""

"""The papers' tables and figures, and questions of our own: one module per study."""

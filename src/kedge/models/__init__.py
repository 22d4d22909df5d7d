"""The bundled model."""

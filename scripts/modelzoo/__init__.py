"""Builders of the test models that scripts/models.py writes."""

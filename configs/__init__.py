"""Gin files, one a published experiment."""

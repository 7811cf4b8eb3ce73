"""The environments: one module a family."""

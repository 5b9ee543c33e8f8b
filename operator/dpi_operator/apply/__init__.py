"""Carrying out plans against the Kubernetes API."""

"""Settings, model and parallel configuration, fingerprint, machine facts; imports no torch."""

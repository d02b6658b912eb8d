"""Environments for multi-turn samples, one file each; see `longtail.partial_rollout.environment`."""

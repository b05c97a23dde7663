"""The sidecar: policies as a service beside an engine."""

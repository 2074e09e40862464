"""Workers in the pods of Kubernetes: manifests to apply, and a launcher that uses ``kubectl``."""

"""Pods on a Kubernetes cluster, through the official client."""

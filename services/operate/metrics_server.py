"""Serves the Prometheus metrics of this process."""

from __future__ import annotations

from prometheus_client import Info, start_http_server

from headrace.errors import UsageError

SERVICE_INFO = Info("headrace_service", "What runs in this process: service, namespace, policy.")


def serve_metrics(address: str, port: int) -> None:
    """Serves `/metrics` in a thread. Raises UsageError if the address can't be listened on."""
    try:
        start_http_server(port, addr=address)
    except OSError as error:
        raise UsageError(
            f"can't serve metrics on {address}:{port}: {error.strerror}. Choose another "
            "--metrics-port or --metrics-address"
        ) from error

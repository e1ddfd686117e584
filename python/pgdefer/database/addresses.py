"""The addresses of hosts: psycopg would look them up in the event loop's default executor."""

from __future__ import annotations

import os
import socket

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer.database.own_threads import in_own_thread

__all__ = ["with_addresses"]


async def with_addresses(conninfo: str) -> str:
    """Add the addresses of the hosts that a DSN, or libpq's environment variables, name."""
    given = conninfo_to_dict(conninfo)
    hosts, known, ports = (
        str(given.get(name, os.environ.get(variable, ""))).split(",")
        for name, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR"), ("port", "PGPORT"))
    )
    if len(ports) == 1:
        ports *= len(hosts)
    # Without names of hosts there is nothing to do; psycopg refuses numbers that do not fit.
    if known != [""] or not any(map(_is_name, hosts)) or len(ports) != len(hosts):
        return conninfo
    found = await in_own_thread(_look_up, hosts, ports)
    names, addresses, numbers = (",".join(values) for values in zip(*found, strict=True))
    return make_conninfo(conninfo, host=names, hostaddr=addresses, port=numbers)


def _is_name(host: str) -> bool:
    """Whether it is no folder of sockets."""
    return host != "" and not host.startswith("/")


def _look_up(hosts: list[str], ports: list[str]) -> list[tuple[str, str, str]]:
    """Return the name, address and port of each address. One host of several may be unknown."""
    found = []
    error: OSError | None = None
    for host, port in zip(hosts, ports, strict=True):
        addresses = [""]
        if _is_name(host):
            try:
                known = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
            except OSError as refused:
                error = refused
                continue
            addresses = [str(each[4][0]) for each in known]
        found += [(host, address, port) for address in addresses]
    if not found:
        raise psycopg.OperationalError(f"failed to resolve host {hosts[-1]!r}: {error}") from error
    return found

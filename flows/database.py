"""The PostgreSQL database of Prefect's server, where it isn't the SQLite file in PREFECT_HOME: its address, and a check before a start.

An address may have a password, so it travels in the environment, and no message has it.
"""

from __future__ import annotations

import asyncio
import os
import re
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from rlhf_core.config import ConfigError, shown

# Prefect's own variables; of several the first counts.
DATABASES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
DRIVER = "postgresql+asyncpg"
EXAMPLE = "postgresql://USER@HOST/DATABASE"
CONNECT_SECONDS = 20.0
NAME = "RLHF_PREFECT_DATABASE"  # the server's database, without its password, for this process and its children; absent with SQLite
# An answer of 500 is what the server gives while PostgreSQL restarts. Prefect repeats a request five times, for a minute together.
REPEATED = {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "500"}


def take_database(given: str | None) -> dict[str, str]:
    """Take the address of a database out of this process's environment, and return the server's variables; none with SQLite.

    Processes started later, such as the worker's flows, don't see the address.

    Args:
        given: --database, which counts before the environment.
    Raises:
        ConfigError: it isn't PostgreSQL's address, has a password on the command line, or the database can't be used.
    """
    if given and public(given) != given:
        raise ConfigError(
            "--database: expected an address without a password, since others see command lines, got one with it; set PGPASSWORD, write "
            f"~/.pgpass, or put the whole address into {DATABASES[0]}"
        )
    found = forget_addresses()
    url = given or found
    if not url:
        use_database(None)
        return {}
    url = as_prefect_reads(url, "--database" if given else DATABASES[0])
    if url.startswith(DRIVER):
        check_database(url)
    use_database(public(url))
    return {DATABASES[0]: url}


def forget_addresses() -> str:
    """Take the addresses of databases out of this process's environment, and return the first; empty if there is none."""
    return next(filter(None, [os.environ.pop(name, "") for name in DATABASES]), "")


def use_database(named: str | None) -> None:
    """Set this process up for a server with this database, whose address has no password; None: SQLite in PREFECT_HOME."""
    os.environ.pop(NAME, None)
    if named is None:
        return
    os.environ[NAME] = named
    if named.startswith(DRIVER):
        for name, value in REPEATED.items():
            os.environ.setdefault(name, value)


def as_prefect_reads(url: str, subject: str) -> str:
    """Return PostgreSQL's usual address in the form that Prefect takes; one of SQLite is left as it is.

    Raises:
        ConfigError: it is no such address. `subject` says where it comes from.
    """
    if url.startswith("sqlite+aiosqlite:"):
        return url
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("postgres", "postgresql", DRIVER) and parts.port != 0
    except ValueError:  # a port that isn't a number, or half an IPv6 address
        known = False
    if not known:
        raise ConfigError(f"{subject}: expected {EXAMPLE}, got {shown(repr(public(url)))}; see docs/runs.md")
    if not parts.path.strip("/"):
        raise ConfigError(f"{subject}: expected {EXAMPLE}, got no name of a database in {shown(repr(public(url)))}; add /DATABASE")
    # asyncpg's driver has another word for sslmode.
    query = urlencode([("ssl" if name == "sslmode" else name, value) for name, value in parse_qsl(parts.query)], safe="/")
    return f"{DRIVER}://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")


def public(url: str) -> str:
    """Return an address without its password."""
    return re.sub(r"(//[^/@]*?):[^/]*@", r"\1:***@", re.sub(r"(password=)[^&]*", r"\1***", url))


def check_database(url: str) -> None:
    """Check that the database answers, and that the server may lay out its tables there.

    Raises:
        ConfigError: says what is wrong, without the password.
    """
    subject = f"database {public(url)}"
    try:
        missing = asyncio.run(_missing_rights(url))
    except Exception as error:  # of asyncpg, of SQLAlchemy, of the network
        words = _without_secret(str(error) or type(error).__name__, url)
        raise ConfigError(
            f"{subject}: expected an answer within {CONNECT_SECONDS:.0f} s, got {type(error).__name__}: {shown(words, 300)}; check host, "
            "port, name and password (PGPASSWORD or ~/.pgpass), and that PostgreSQL runs"
        ) from None
    if missing:
        raise ConfigError(f"{subject}: expected {missing}; make the user the database's owner: `createdb --owner USER DATABASE`")


async def _missing_rights(url: str) -> str:
    """Ask the database as Prefect would, and return which right is missing, or nothing."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    engine = create_async_engine(url, poolclass=NullPool, connect_args={"timeout": CONNECT_SECONDS})
    async with asyncio.timeout(CONNECT_SECONDS), engine.connect() as connection:
        laid_out, tables, extensions = (await connection.execute(text(_RIGHTS))).one()
    if not laid_out and not tables:
        return "a user who may create tables in its schema, got one who may not"
    if not laid_out and not extensions:
        return "a user who may create the extension pg_trgm, got one without the right CREATE on the database"
    return ""


def _without_secret(text: str, url: str) -> str:
    """Return a driver's message without the password, should it quote the address."""
    parts = urlsplit(url)
    secrets = [parts.password, *(value for name, value in parse_qsl(parts.query) if name == "password")]
    for form in filter(None, (form for secret in secrets if secret for form in (secret, unquote(secret)))):
        text = text.replace(form, "***")
    return text


_RIGHTS = """
select to_regclass('alembic_version') is not null,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false),
       has_database_privilege(current_database(), 'CREATE') or exists (select from pg_extension where extname = 'pg_trgm')
"""

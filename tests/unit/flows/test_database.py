"""The address of Prefect's database: what is taken, what is refused, and what no message says."""

from __future__ import annotations

import os
from urllib.parse import quote

import pytest
from postgres import PASSWORD, USER, postgres

from flows.database import DATABASES, NAME, as_prefect_reads, check_database, public, take_database
from flows.server import start_server, use_server
from rlhf_core.config import ConfigError
from rlhf_core.engines.ports import free_ports


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Restores what `take_database` changes."""
    for name in (*DATABASES, NAME, "PREFECT_CLIENT_RETRY_EXTRA_CODES", "PGPASSWORD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("postgresql://me@db.example:5433/prefect", "postgresql+asyncpg://me@db.example:5433/prefect"),
        ("postgres://me:a%2Fb@[::1]/prefect", "postgresql+asyncpg://me:a%2Fb@[::1]/prefect"),
        ("postgresql+asyncpg://db/prefect", "postgresql+asyncpg://db/prefect"),
        ("postgresql:///prefect?host=/run/postgresql", "postgresql+asyncpg:///prefect?host=/run/postgresql"),
        ("postgresql://db/prefect?sslmode=verify-full", "postgresql+asyncpg://db/prefect?ssl=verify-full"),
        ("sqlite+aiosqlite:////srv/prefect.db", "sqlite+aiosqlite:////srv/prefect.db"),
    ],
)
def test_addresses_are_taken_in_the_usual_form(given, read):
    assert as_prefect_reads(given, "DB") == read


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("mysql://me:hidden@db/prefect", r"DB: expected postgresql://USER@HOST/DATABASE, got 'mysql://me:\*\*\*@db/prefect'"),
        ("postgresql://me:hidden@db:port/prefect", "DB: expected postgresql://USER@HOST/DATABASE, got"),
        ("postgresql://me:hidden@db", "got no name of a database in .*add /DATABASE"),
        ("db.example", "expected postgresql://USER@HOST/DATABASE, got 'db.example'"),
    ],
)
def test_another_address_is_refused_without_its_password(given, says):
    with pytest.raises(ConfigError, match=says) as refused:
        as_prefect_reads(given, "DB")
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("address", ["postgresql://me:hidden@db/prefect", "postgresql://me@db/prefect?password=hidden"])
def test_a_password_on_the_command_line_is_refused(tmp_path, monkeypatch, capsys, address):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    assert start_server(database=address) == 2
    said = capsys.readouterr().err
    assert said.startswith("--database: expected an address without a password") and "PGPASSWORD" in said and "hidden" not in said


def test_the_address_leaves_the_environment_and_only_its_public_form_stays(monkeypatch):
    assert take_database(None) == {} and NAME not in os.environ
    monkeypatch.setenv(DATABASES[1], "sqlite+aiosqlite:////srv/prefect.db")
    assert take_database(None) == {DATABASES[0]: "sqlite+aiosqlite:////srv/prefect.db"}
    assert DATABASES[1] not in os.environ and os.environ[NAME] == "sqlite+aiosqlite:////srv/prefect.db"
    assert public("postgresql://me:a:b@db/prefect?password=c&ssl=require") == "postgresql://me:***@db/prefect?password=***&ssl=require"


def test_a_run_at_a_given_server_forgets_the_address_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv(DATABASES[0], "postgresql://me:hidden@db/prefect")
    with use_server(tmp_path):
        assert DATABASES[0] not in os.environ


def test_a_database_that_does_not_answer_is_named_without_the_password():
    url = f"postgresql+asyncpg://me:hidden@127.0.0.1:{free_ports(1)[0]}/prefect"
    with pytest.raises(
        ConfigError, match=r"database postgresql\+asyncpg://me:\*\*\*@127.*Connect call failed.*that PostgreSQL runs"
    ) as refused:
        check_database(url)
    assert "hidden" not in str(refused.value)


def test_passwords_names_and_rights_are_checked_on_a_real_postgresql(monkeypatch):
    with postgres() as server:
        with pytest.raises(ConfigError, match="InvalidPasswordError: password authentication failed"):
            take_database(server.url())
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        with pytest.raises(ConfigError, match=r'InvalidCatalogNameError: database "elsewhere" does not exist'):
            take_database(server.url(database="elsewhere"))
        found = take_database(server.url())
        assert found == {DATABASES[0]: server.url().replace("postgresql:", "postgresql+asyncpg:")}
        assert os.environ[NAME] == found[DATABASES[0]] and os.environ["PREFECT_CLIENT_RETRY_EXTRA_CODES"] == "500"

        monkeypatch.delenv("PGPASSWORD")
        secret = server.url().replace(f"{USER}@", f"{USER}:{quote(PASSWORD, safe='')}@")
        monkeypatch.setenv(DATABASES[0], secret)
        assert quote(PASSWORD, safe="") in take_database(None)[DATABASES[0]] and "***" in os.environ[NAME]

        server.sql(f"create user guest password '{PASSWORD}'")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        with pytest.raises(ConfigError, match="may create tables in its schema, got one who may not; make the user the database's owner"):
            take_database(server.url("guest"))
        server.sql("grant create on schema public to guest", "prefect")
        with pytest.raises(ConfigError, match="may create the extension pg_trgm"):
            take_database(server.url("guest"))
        server.sql("create extension pg_trgm", "prefect")
        assert take_database(server.url("guest"))

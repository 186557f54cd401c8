"""SQLite databases: transactions that fail."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from barnraise.core.database import open_database, transaction
from barnraise.core.errors import AgentError


class _DiskError(Exception):
    """Error of a disk, in this test."""


def test_error_is_kept_if_sqlite_has_rolled_back_itself(tmp_path: Path) -> None:
    base = open_database(tmp_path / "a.db", "CREATE TABLE item (name TEXT);", 1, AgentError)

    def fail() -> None:
        with transaction(base):
            base.execute("INSERT INTO item VALUES ('a')")
            base.execute("ROLLBACK")  # as SQLite does after some errors of the disk
            raise _DiskError

    with pytest.raises(_DiskError):
        fail()
    with transaction(base):
        base.execute("INSERT INTO item VALUES ('b')")
    assert base.execute("SELECT name FROM item").fetchall() == [("b",)]
    base.close()


def test_commit_that_fails_leaves_no_open_transaction(tmp_path: Path) -> None:
    other = "other TEXT REFERENCES item DEFERRABLE INITIALLY DEFERRED"
    tables = f"CREATE TABLE item (name TEXT PRIMARY KEY, {other});"
    base = open_database(tmp_path / "a.db", tables, 1, AgentError)
    base.execute("PRAGMA foreign_keys=ON")
    with pytest.raises(sqlite3.IntegrityError), transaction(base):
        base.execute("INSERT INTO item VALUES ('a', 'nothing')")
    with transaction(base):
        base.execute("INSERT INTO item VALUES ('b', NULL)")
    assert base.execute("SELECT name FROM item").fetchall() == [("b",)]
    base.close()

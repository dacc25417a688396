"""Studies in a database, as tests read them."""

from __future__ import annotations

import optuna
import sqlalchemy.pool


def storage(url: str) -> optuna.storages.RDBStorage:
    """A storage that closes each connection after its use, so that no garbage collector has to."""
    return optuna.storages.RDBStorage(url, engine_kwargs={"poolclass": sqlalchemy.pool.NullPool})

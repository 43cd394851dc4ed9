"""What can go wrong with data."""

from __future__ import annotations

__all__ = ["DataError", "NotAvailableError"]


class DataError(Exception):
    """A data set cannot be used as asked; the message names the cause and the cure."""


class NotAvailableError(DataError):
    """A data set is in none of the places where it is looked for, and could not be downloaded."""

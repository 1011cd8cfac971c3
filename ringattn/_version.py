"""The one place the version is written: the package and the wheel both read it here."""

__version__ = "0.1.0"

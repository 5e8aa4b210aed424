"""The version of Millstream; packaging reads it from here."""

VERSION = "0.1.0"

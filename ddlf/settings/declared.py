"""The table of all settings, for packages below ``ddlf.training``. Runs everywhere; imports no heavy modules."""

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any

from ddlf.settings.setting import Setting


@cache
def declared() -> Mapping[str, Setting[Any, Any]]:
    """Return each setting by the name of the app's attribute.

    ``ddlf.training`` declares the settings and imports the packages that check or show them. So these packages load the
    table by its name, like a strategy of another package.
    """
    settings: Mapping[str, Setting[Any, Any]] = resolve_name("ddlf.training.registry:SETTINGS")
    return settings


def declared_with(mode: Any, exchange: Any) -> Mapping[str, Setting[Any, Any]]:
    """Return the settings of ``declared``, and the settings of a strategy or exchange of another package."""
    settings: Mapping[str, Setting[Any, Any]] = resolve_name("ddlf.training.registry:settings_with")(mode, exchange)
    return settings

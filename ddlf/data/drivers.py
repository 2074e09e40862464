"""Drivers of fsspec: which there are, what each needs, and the file system of a URL."""

from __future__ import annotations

import functools
from typing import Any

from ddlf.errors import ConfigError, DatasetError

DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hdfs": "pyarrow",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
}
"""What has to be installed for a URL's scheme."""


@functools.cache
def known() -> Any:
    """The package fsspec.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise DatasetError("data at a URL needs fsspec, which is not installed", hint="pip install fsspec") from None
    return fsspec


def opened(url: str, scheme: str) -> tuple[Any, str]:
    """The file system of a URL, and the path of the URL there.

    Args:
        url: Such as ``s3://bucket/folder``.
        scheme: What stands before its colon.

    Raises:
        ConfigError: The URL cannot be used.
        DatasetError: There is no driver, or it cannot begin.
    """
    fsspec = known()
    if scheme not in fsspec.available_protocols():
        hint = "use s3://, gs://, abfs://, https:// or a folder"
        raise DatasetError(f"no driver is known for {scheme}://", hint=hint)
    try:
        # Lists are of what is there now, and a store of this process is nobody else's.
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError:
        wanted = DRIVERS.get(scheme, f"the driver of fsspec for {scheme}")
        said = f"{scheme}:// needs {wanted}, which is not installed here"
        raise DatasetError(said, hint=f"pip install {wanted}") from None
    except ValueError as error:
        raise ConfigError(f"{url} cannot be used ({error})", hint="write it as s3://bucket/folder") from None
    except Exception as error:  # as that of hdfs where there is no Java
        raise DatasetError(
            f"{scheme}:// cannot be used: {first_line(error)}", hint="install what its driver needs"
        ) from error
    return fs, root.rstrip("/")


def first_line(error: BaseException | None) -> str:
    """What an error says first, of at most 300 characters."""
    return (str(error).strip().splitlines() or [""])[0][:300]

"""Make the bytes of .npy files, and tar files."""

import io
import tarfile

import numpy as np


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_tar(path, members):
    """Write a tar file. Each member has a name or a whole header, and its bytes."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path

"""Import Keras and the parts of DDLF that train with it. A fork server imports this module once; see ``masters``."""

import importlib
import os

from ddlf.training.roles import PRELOADED
from ddlf.worker.template import NO_THREAD

os.environ.setdefault(*NO_THREAD)
for name in PRELOADED:
    importlib.import_module(name)

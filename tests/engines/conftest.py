"""Tests with real engines. They run only with ``scripts/test --engines``."""

import os

collect_ignore_glob = [] if os.environ.get("DDLF_ENGINES") else ["test_*.py"]

"""`python -m dcpkernels COMMAND`, where the script `dcpkernels` is not on PATH."""

from __future__ import annotations

import sys

from dcpkernels.cli import main

if __name__ == "__main__":
    sys.exit(main())

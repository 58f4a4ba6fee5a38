"""The fuzz: options at random against the oracle, for as long as one likes.

    python -m tests.fuzz --minutes 10 --seed 7      on both cores
    python -m tests.fuzz gradients:7:123            one case again

A case is a pure function of its kind, the seed and its index.
"""

import sys

from tests.fuzz.run import main

sys.exit(main())

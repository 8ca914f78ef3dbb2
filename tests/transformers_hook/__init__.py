"""`model.generate` with `custom_generate=lookahead.decoding()` keeps every promise of `model.generate` without it."""

import pytest

pytest.register_assert_rewrite("pairs")

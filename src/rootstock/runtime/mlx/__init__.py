"""Runtime for mlx-lm's models."""

from __future__ import annotations

import resource

# mlx-lm limits the whole process to 2,048 open files when it is imported. It lowers the hard limit as well, which
# only root can raise again, and its import fails where that limit is lower. A server has a file for each connection.
_set_limit = resource.setrlimit
resource.setrlimit = lambda *limit: None
try:
    import mlx_lm.utils  # noqa: F401
finally:
    resource.setrlimit = _set_limit

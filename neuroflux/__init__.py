"""Train CNNs inside a memory budget: block by block, every layer from its own local loss.

>>> import neuroflux                                                        # doctest: +SKIP
>>> result = neuroflux.fit(model, train, val, budget="512MB")               # doctest: +SKIP
>>> result.model(images)                                                    # doctest: +SKIP

The same from a shell: ``python -m neuroflux.train --budget 512MB``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["fit", "load", "make_plan"]

if TYPE_CHECKING:
    from neuroflux.api import fit, load, make_plan


def __getattr__(name: str) -> Any:
    """Import the library only when something of it is used, so that ``import neuroflux`` stays quick."""
    if name in __all__:
        from neuroflux import api

        return getattr(api, name)
    raise AttributeError(f"module 'neuroflux' has no attribute {name!r}")

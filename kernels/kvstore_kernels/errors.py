"""Errors of the kernels package: all are KernelErrors, so ValueErrors."""


class KernelError(ValueError):
    """Base of every error this package raises on purpose."""


class LayoutError(KernelError):
    """Shapes, dtypes or sizes that no block layout can hold."""


class PlanError(KernelError):
    """A codec plan that is damaged, or made for another layout."""


class TableError(KernelError):
    """A block table used outside its blocks."""


class UnsupportedAttentionError(KernelError):
    """An attention option that these kernels can't honour."""

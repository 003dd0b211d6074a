"""Several sources of rows: their pass rates, and a curriculum by the pass rates of rows."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    order="Order verdict",
    check="check_sources load_environments",
    environments="of_sources",
    source="followed source_names",
)

"""The schemes, one short file each. Importing this package registers them in the order of the tables."""

from jkv.schemes import (  # noqa: F401, I001  (their order here is the order of registration)
    bf16,
    fp8,
    rtn,
    kivi,
    rotatekv,
    flagrot_kivi,
    flagrot_auto,
    turboquant,
    ultra_tq,
    ultraquant,
)

"""Value sides: from the bytes of 32 tokens and their probabilities to output tiles.

Output tiles are transposed: rows are 16 channels, columns query j twice. Where values have a scale per segment, the
first of the two columns carries the probabilities times the even segment's scale and the second the odd one's; of each
m-tile only the column of its own segment is used. Offsets are summed apart, once per segment and query.
"""

from pallas_kernels.warp.plain_values import FloatValues, HeadValues, PowerValues
from pallas_kernels.warp.segment_values import SegmentValues

ValueSide = SegmentValues | HeadValues | PowerValues | FloatValues

__all__ = ["FloatValues", "HeadValues", "PowerValues", "SegmentValues", "ValueSide"]

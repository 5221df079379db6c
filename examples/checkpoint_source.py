"""What a checkpoint on disk holds: python examples/checkpoint_source.py DIR. `weightcast load` sends it to engines."""

import sys

from weightcast import CheckpointSource

table = CheckpointSource(sys.argv[1]).describe().table
for row in range(len(table)):
    print(*table.region(row)[:3])

"""Bounds of the files that clients send. They bound what a decoder does for one file, whatever is in it."""

MAX_PICTURE_BYTES = 10 << 20
MAX_PICTURE_PIXELS = 50_000_000
MIN_SIDE = 2
# Longer sides are scaled down: no encoder looks at more.
MAX_SIDE = 2048
# Encoders cut a picture into squares, or scale it to one.
MAX_SIDE_RATIO = 200

MAX_SOUND_BYTES = 25 << 20
# What OpenAI's API demands. Some encoders read past the end of shorter sounds.
MIN_SOUND_S = 0.1
MAX_SOUND_S = 600
MAX_SAMPLE = 16.0

# Of one request, pictures and sounds together.
MAX_FILES = 8

TIME_LIMIT_S = 10.0
# A picture of the most pixels takes 200 MB, and is in memory up to six times while a WebP file is decoded.
DECODER_MEMORY_BYTES = 3 << 29

# Of media whose files may come again. The largest picture has 12 MiB.
REMEMBERED_BYTES = 128 << 20

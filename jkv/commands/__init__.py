"""The commands of ``jkv``, one file each. They import what they need when they run, so that ``jkv --help`` is quick."""

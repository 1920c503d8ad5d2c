# make demo: the main job on the shipped pair. make test: what CI runs.

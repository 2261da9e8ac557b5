#!/usr/bin/env bash
# The main job on this machine: data -> base model -> fine-tune and a draft model -> export -> decode -> report.
# Finished stages are skipped; an interrupted demo continues where it stopped.
exec bash "$(dirname "$0")/pipeline.sh" demo "${1:-runs/demo}"

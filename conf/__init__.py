"""Code and settings that all packages share; the folders of YAML are the settings of each command.

    errors                     error messages for users
    settings/                  Hydra's YAML and overrides to typed dataclasses; the command line
    runs/                      output folders of stages, manifests, atomic files, Weights & Biases
    text/                      text to ids, chats, conversations, infilling, files of rows
    devices/                   dtype, waiting threads and free memory of a device
    architecture               which architectures train and decode
    hub                        settings that may name a model on the Hugging Face Hub
    console, pages             text on terminals; HTML pages with plots

This package depends on no stage: each stage passes in its own settings dataclass.
"""

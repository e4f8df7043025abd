"""From a recipe to a model.

`sources.prepare` turns the text of a recipe into tokens, `loop.train` trains, and
`gap_probe.transfer_gap` reads the transfer scores of finished runs. A recipe (`recipe`,
`recipe_io`) and prepared text (`data`) make a `run`, which starts from an encoder (`start`) and is
changed by the `step`s of the `loop` and the `optimizer`; its state is saved in `checkpoints`, its
metrics in `telemetry`. Linear maps are solved in `closed_form`.
"""

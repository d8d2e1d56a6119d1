"""verl's own config, made by Hydra from this program's arguments, and what the origin's keys in it become: no Ray, no torch.

As in verl's programs, our plugin is there before Hydra is called.
"""

import importlib.util
import os
import types

import hydra
from omegaconf import OmegaConf

from shaketable.integrations import verl
from shaketable.integrations.origin_configs.translate import translate

verl._on_config(types.SimpleNamespace(validate_config=None))
FOLDER = os.path.join(os.path.dirname(importlib.util.find_spec("verl").origin), "trainer", "config")


@hydra.main(config_path=FOLDER, config_name="ppo_trainer", version_base=None)
def main(config):
    found = translate(OmegaConf.to_container(config, resolve=True))
    print(f"plan {found.plan and found.plan.text()}")
    print(f"aqn {found.aqn and found.aqn.text()}")


main()

"""Everything that verl 0.9.1 with vLLM 0.27 needs to train on a CPU, and nothing of ours.

verl trains on accelerators. Four things are missing on a CPU, and each is put in through a door that the frameworks
themselves offer, so that the integration under test is the one a user of GPUs has:

1. a platform called cpu (`PlatformRegistry`), which counts one pretended GPU with Ray, so that placement is verl's own;
2. process groups on gloo: verl asks for `cpu:gloo,<device>:<backend>`, which names the CPU twice here;
3. `pin_memory`, which the reference policy asks for and which has no meaning without an accelerator;
4. vLLM's linears as plain `F.linear`: its CPU build packs the weights after loading and throws the originals away, and then
   verl's weight sync has nothing to write to.

The folder of this package goes on PYTHONPATH; the dist-info beside it carries the two entry points. The settings that go with
it (`VERL_PLATFORM=cpu`, no sleep mode, eager, fp32 …) are in `tiny_run.py`. verl swallows what its plugins raise, but
then `VERL_PLATFORM=cpu` names a platform it does not know, and it stops.
"""

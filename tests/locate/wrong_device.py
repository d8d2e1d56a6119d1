"""A device on which operators are wrong, for every model that runs on it: below torch's functions, with nothing of ours."""

from torch.utils._python_dispatch import TorchDispatchMode


class Wrong(TorchDispatchMode):
    """Changes the results of some operators, where their arguments fulfil a condition."""

    def __init__(self, operators, wrong, when=lambda args: True):
        super().__init__()
        self.operators = operators if isinstance(operators, tuple) else (operators,)
        self.wrong, self.when, self.count = wrong, when, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.operators and self.when(args):
            self.count += 1
            return self.wrong(result, args)
        return result

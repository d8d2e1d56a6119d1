"""How many modules of a model have each role."""

from shaketable.sites.structure import ROLES


def role_counts(anatomy):
    return {role: n for role in ROLES if (n := sum(part.role == role for part in anatomy.parts))}

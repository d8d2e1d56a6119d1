"""Trainers and samplers of others: one thin file each, importing its framework when it is used."""

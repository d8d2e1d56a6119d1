"""The drawings of a report, one file per figure: inline SVG made of numbers, coloured by the page's variables."""

"""Plans inside torch.compile: operators that find their tap at run time (`compiled`), and noise that inductor fuses (`fused`,
`lowered`)."""

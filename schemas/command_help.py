"""How a command's `--help` looks: worker, command line and measurements share it."""

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose help names every option in full, its meaning below or beside it, by panels.

    typer's own table cuts names (`--security-proto…`) and squeezes meanings into a few columns on a terminal of 80.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.context_settings.setdefault("max_content_width", 110)  # of a wider terminal

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)
        self.format_epilog(ctx, formatter)

//! The `atoll` binary: puts the parts together, and nothing else.

mod apply_command;
mod args;
mod batching_command;
mod bench_command;
mod big_model;
mod binding;
mod check_command;
mod cluster_args;
mod cluster_command;
mod conformance_command;
mod demo_command;
mod devices;
mod disb_command;
mod engine;
mod failure;
mod frontend_bench;
mod grid;
mod lane;
mod loader;
mod memory_arg;
mod models_command;
mod npy;
mod nvidia;
mod padding_command;
mod plan_command;
mod popularity;
mod preempt_command;
mod profile_command;
mod run_command;
mod serve_command;
mod server_bench;
mod sim_command;
mod soak;
mod swap_command;
mod testbed;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::args::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    cuda::tune_allocator();
    end_quietly_without_a_reader();
    let cli = Cli::parse();
    let code = match start_logging(&cli).and_then(|()| run(cli.command)) {
        Ok(()) => 0,
        Err(failure) => failure.report(),
    };
    cuda::end_process(code);
    ExitCode::from(code)
}

/// Whoever reads the answer may have seen enough (`atoll plan ... | head`): what is printed after that is nobody's, and no defect.
fn end_quietly_without_a_reader() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let said = panic.payload_as_str().unwrap_or_default();
        if said.starts_with("failed printing to stdout")
            || said.starts_with("failed to write completion")
        {
            std::process::exit(0);
        }
        report(panic);
    }));
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Check(args) => check_command::run(&args),
        Command::Run(args) => run_command::run(&args),
        Command::Profile(args) => profile_command::run(&args),
        Command::Conformance(args) => conformance_command::run(&args),
        Command::Models(args) => models_command::run(&args),
        Command::Serve(args) => serve_command::run(&args),
        Command::Demo(args) => demo_command::run(&args),
        Command::Sim(args) => sim_command::run(&args),
        Command::Bench(args) => bench_command::run(&args),
        Command::Plan(args) => plan_command::run(&args),
        Command::Apply(args) => apply_command::run(&args),
        Command::Cluster(args) => cluster_command::run(&args.role),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "atoll", &mut std::io::stdout());
            Ok(())
        }
    }
}

/// Logs go to standard error, so that standard output stays the command's answer.
fn start_logging(cli: &Cli) -> Result<(), Failure> {
    let filter: Targets =
        cli.log.parse().map_err(|err| Failure::usage(format!("--log {}: {err}", cli.log)))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let registry = tracing_subscriber::registry();
    if cli.log_json {
        registry.with(lines.json()).with(filter).init();
    } else {
        registry.with(lines.compact()).with(filter).init();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

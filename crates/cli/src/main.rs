//! The `atoll` binary: puts the parts together, and nothing else.

mod apply_command;
mod args;
mod check_command;
mod cluster_args;
mod cluster_command;
mod conformance_command;
mod demo_command;
mod grid;
mod listen;
mod models_command;
mod npy;
mod nvidia;
mod plan_command;
mod popularity;
mod profile_command;
mod run_command;
mod serve_command;
mod shutdown_signal;
mod sim_command;

use std::io::IsTerminal;
use std::process::ExitCode;

use assembly::Failure;
use benchmarks::ServeSettings;
use clap::{CommandFactory, Parser};
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};

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
        Command::Serve(args) if args.cluster => cluster_command::serve_all(&args),
        Command::Serve(args) => serve_command::run(&args),
        Command::Demo(args) => demo_command::run(&args),
        Command::Sim(args) => sim_command::run(&args),
        Command::Bench(args) => benchmarks::run(&args, parse_serve_arguments),
        Command::Plan(args) => plan_command::run(&args),
        Command::Apply(args) => apply_command::run(&args),
        Command::Cluster(args) => cluster_command::run(&args.role),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "atoll", &mut std::io::stdout());
            Ok(())
        }
    }
}

/// Parses arguments of `atoll serve`, for the benchmark that compares a server with its engine.
fn parse_serve_arguments(arguments: &[String]) -> Result<ServeSettings, Failure> {
    let command = std::iter::once("atoll".to_string()).chain(arguments.iter().cloned());
    match Cli::try_parse_from(command).map_err(Failure::usage)?.command {
        Command::Serve(args) if !args.cluster => Ok(ServeSettings {
            node: serve_command::node_options(&args),
            device: args.device,
            gpu_memory: args.gpu_memory,
        }),
        _ => Err(Failure::usage("arguments after -- are those of one server, without --cluster")),
    }
}

/// Logs go to standard error, so that standard output stays the command's answer.
fn start_logging(cli: &Cli) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&cli.log)
        .map_err(|err| Failure::usage(format!("--log {}: {err}", cli.log)))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    if cli.log_json {
        builder.json().init();
    } else {
        builder.compact().init();
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

//! The `atoll` binary: parses arguments and runs commands.

mod apply_args;
mod apply_command;
mod args;
mod canary_command;
mod check_command;
mod cluster_args;
mod cluster_command;
mod conformance_command;
mod data_folder;
mod demo_command;
mod deprecated_env;
mod grid;
mod kernels_command;
mod listen;
mod log_lines;
mod models_command;
mod npy;
mod nvidia;
mod plan_command;
mod popularity;
mod process_replacement;
mod profile_command;
mod quantize_command;
mod registry_args;
mod registry_command;
mod run_command;
mod security_args;
mod serve_command;
mod server_client;
mod shutdown_signal;
mod sim_command;
mod token_command;
mod top_command;
mod trace_command;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use assembly::{Failure, model_check};
use benchmarks::ServeSettings;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use model::HostMemory;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::args::{Cli, Command};
use crate::deprecated_env::DeprecatedValues;
use crate::log_lines::LogLines;

#[global_allocator]
static ALLOCATOR: cuda::Allocator = cuda::Allocator;

fn main() -> ExitCode {
    cuda::tune_allocator();
    if std::env::args_os().nth(1).is_some_and(|command| command == model_check::COMMAND) {
        // Before anything starts a thread or opens a file: it gives up its rights first.
        let code = model_check::run_child();
        cuda::end_process(code);
        return ExitCode::from(code);
    }
    process_replacement::inherit();
    exit_without_error_on_closed_stdout();
    let deprecated = deprecated_env::read();
    let cli = parse(std::env::args_os(), &deprecated).unwrap_or_else(|err| err.exit());
    if let Some(mib) = cli.memory_limit_mib {
        let bytes = mib.checked_mul(1 << 20).and_then(|bytes| usize::try_from(bytes).ok());
        HostMemory::process().set_limit(bytes.unwrap_or(usize::MAX));
    }
    let started = start_logging(&cli).map(|()| deprecated_env::warn(&deprecated));
    let code = match started.and_then(|()| run(cli.command)) {
        Ok(()) => 0,
        Err(failure) => failure.report(),
    };
    cuda::end_process(code);
    ExitCode::from(code)
}

fn parse(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    deprecated: &DeprecatedValues,
) -> Result<Cli, clap::Error> {
    let command = deprecated_env::apply(Cli::command(), deprecated);
    let matches = command.try_get_matches_from(arguments)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    let given =
        || matches.subcommand().map_or_else(BTreeSet::new, |(name, flags)| given(name, flags));
    match &mut cli.command {
        Command::Plan(args) => args.given = given(),
        Command::Apply(args) => args.given = given(),
        _ => {}
    }
    Ok(cli)
}

/// The flags of a command that the command line has; values of the environment and defaults are
/// none, and neither are flags of all commands.
fn given(command: &str, flags: &ArgMatches) -> BTreeSet<String> {
    let all = Cli::command();
    let own = all.find_subcommand(command).into_iter().flat_map(clap::Command::get_arguments);
    let names = own.map(|argument| argument.get_id().as_str());
    let is_given = |name: &&str| {
        flags.try_contains_id(name).is_ok()
            && flags.value_source(name) == Some(ValueSource::CommandLine)
    };
    names.filter(is_given).map(str::to_string).collect()
}

/// Exits without error when the reader of standard output is gone, as in `atoll plan ... | head`.
fn exit_without_error_on_closed_stdout() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or_default();
        if message.starts_with("failed printing to stdout")
            || message.starts_with("failed to write completion")
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
        Command::Quantize(args) => quantize_command::run(&args),
        Command::Kernels(args) => kernels_command::run(&args),
        Command::Conformance(args) => conformance_command::run(&args),
        Command::Models(args) => models_command::run(&args),
        Command::Registry(args) => registry_command::run(&args),
        Command::ModelCheck => Err(Failure::usage("this command is for the server's own use")),
        Command::Serve(args) if args.cluster => cluster_command::serve_all(&args),
        Command::Serve(args) => serve_command::run(&args),
        Command::Demo(args) => demo_command::run(&args),
        Command::Sim(args) => sim_command::run(&args),
        Command::Bench(args) => benchmarks::run(&args, parse_serve_arguments),
        Command::Plan(args) => plan_command::run(&args),
        Command::Apply(args) => apply_command::run(&args),
        Command::Cluster(args) => cluster_command::run(&args.role),
        Command::Token(args) => token_command::run(&args),
        Command::Trace(args) => trace_command::run(&args),
        Command::Top(args) => top_command::run(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "atoll", &mut std::io::stdout());
            Ok(())
        }
    }
}

/// Parses arguments of `atoll serve`, for the benchmark that compares a server with its engine.
fn parse_serve_arguments(arguments: &[String]) -> Result<ServeSettings, Failure> {
    let command = std::iter::once("atoll".to_string()).chain(arguments.iter().cloned());
    match parse(command, &deprecated_env::read()).map_err(Failure::usage)?.command {
        Command::Serve(args) if !args.cluster => Ok(ServeSettings {
            node: serve_command::node_options(&args),
            device: args.device,
            gpu_memory: args.gpu_memory,
        }),
        _ => Err(Failure::usage("arguments after -- are those of one server, without --cluster")),
    }
}

/// Logs to standard error, so that standard output has only the command's result.
fn start_logging(cli: &Cli) -> Result<(), Failure> {
    let filter: Targets =
        cli.log.parse().map_err(|err| Failure::usage(format!("--log {}: {err}", cli.log)))?;
    let colours = std::io::stderr().is_terminal();
    let lines =
        tracing_subscriber::fmt::layer().with_writer(LogLines { colours }).with_ansi(colours);
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
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}

//! Environment variables under their former names, which keep working for one release.

use clap::{Arg, Command};

/// Former and current names.
const RENAMED: [(&str, &str); 4] = [
    ("ATOLL_APART", "ATOLL_NO_BACKEND_POOLS"),
    ("ATOLL_CORNER", "ATOLL_BEST_EFFORT_SMS"),
    ("ATOLL_BEARABLE", "ATOLL_MAX_RT_SLOWDOWN"),
    ("ATOLL_REAL_TIME_LANES", "ATOLL_CONCURRENT_RT_BATCHES"),
];

/// Values of variables that are set under their former name only: former name, current name, value.
pub(crate) type DeprecatedValues = Vec<(&'static str, &'static str, &'static str)>;

/// Reads the former names from the environment.
pub(crate) fn read() -> DeprecatedValues {
    read_from(|name| std::env::var(name).ok())
}

fn read_from(variable: impl Fn(&str) -> Option<String>) -> DeprecatedValues {
    let used = |(old, new): (&'static str, &'static str)| {
        if variable(new).is_some() {
            return None;
        }
        // Default values of arguments live as long as the process.
        Some((old, new, &*variable(old)?.leak()))
    };
    RENAMED.into_iter().filter_map(used).collect()
}

/// Makes `values` the defaults of the arguments with these variables, in all subcommands.
pub(crate) fn apply(command: Command, values: &DeprecatedValues) -> Command {
    let default = |arg: Arg| {
        let current = arg.get_env().and_then(|name| name.to_str());
        let found = values.iter().find(|(_, new, _)| current == Some(*new));
        match found {
            Some((_, _, value)) => arg.default_value(*value),
            None => arg,
        }
    };
    command.mut_args(default).mut_subcommands(|subcommand| apply(subcommand, values))
}

/// Warns about every former name in use.
pub(crate) fn warn(values: &DeprecatedValues) {
    for (old, new, _) in values {
        tracing::warn!(variable = old, replacement = new, "deprecated environment variable");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use clap::{CommandFactory, FromArgMatches};

    fn served(line: &[&str], values: &DeprecatedValues) -> (u32, f64) {
        let matches = apply(args::Cli::command(), values).try_get_matches_from(line).unwrap();
        match args::Cli::from_arg_matches(&matches).unwrap().command {
            args::Command::Serve(args) => {
                (args.device.settings.best_effort_sms, args.max_rt_slowdown)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn former_names_are_defaults() {
        let set = [("ATOLL_CORNER", "8"), ("ATOLL_BEARABLE", "2.5")];
        let find = |name: &str| set.iter().find(|(key, _)| *key == name);
        let values = read_from(|name| find(name).map(|(_, value)| (*value).to_string()));
        assert_eq!(served(&["atoll", "serve"], &values), (8, 2.5));
        let flags = ["atoll", "serve", "--corner", "24", "--max-rt-slowdown", "0"];
        assert_eq!(served(&flags, &values), (24, 0.0));
    }

    #[test]
    fn current_names_take_precedence() {
        assert!(read_from(|_| Some("8".to_string())).is_empty());
        assert!(read_from(|_| None).is_empty());
    }
}
